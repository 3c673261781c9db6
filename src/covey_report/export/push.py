"""Upload a folder to the hub."""

from pathlib import Path

from covey.system.hub import silence
from covey.system.text.format import one_line


def check_push(repository: str) -> None:
    """Refuse a push that cannot succeed, before any work. ValueError."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"--push must be OWNER/NAME, got {repository}") from error
    if problem := silence():
        raise ValueError(f"--push {repository} needs the hub: {problem}")
    if get_token() is None:
        raise ValueError(f"--push {repository} needs a token of the hub: hf auth login, or HF_TOKEN")


def push_folder(folder: Path, repository: str) -> str:
    """Upload a folder, a new repository being private; return where."""
    from huggingface_hub import HfApi

    try:
        made = HfApi().create_repo(repository, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="A policy trained by covey")
    except Exception as error:  # the hub's own errors, those of its client and of the network
        said = one_line(str(error) or type(error).__name__)[:200]
        raise ValueError(
            f"--push {repository} was refused ({said}); try again: hf upload {repository} {folder}"
        ) from error
    return f"it is at {made}, private if it is new"
