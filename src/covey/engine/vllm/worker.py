"""The worker extension of vLLM that loads pushed weights."""

from pathlib import Path
from typing import Any

from safetensors import safe_open

from covey.engine.vllm.files import read_shapes
from covey.engine.weights import difference


class Receiver:
    """A worker extension (`worker_extension_cls`) whose methods become the worker's."""

    model_runner: Any
    vllm_config: Any
    model_config: Any

    def covey_refusal(self, folder: str) -> str:
        """Return why the weights in `folder` must be refused, else "".

        Nothing is changed: vLLM would load an incomplete set without an error, and a wrong shape would break every
        later load.
        """
        return difference(read_shapes(Path(folder)), read_shapes(model_folder(str(self.model_config.model))))

    def covey_load(self, folder: str) -> None:
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            initialize_layerwise_reload(model)
            for file in sorted(Path(folder).glob("*.safetensors")):
                with safe_open(file, framework="pt") as tensors:
                    model.load_weights((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118
            finalize_layerwise_reload(model, self.model_config)
            pack_tied_heads(model)


def pack_tied_heads(model: Any) -> None:
    """Pack tied heads again: a reload leaves packed copies of old weights."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    for head in embeddings:
        if isinstance(head, ParallelLMHead) and any(head.weight is e.weight for e in embeddings if e is not head):
            head.quant_method.process_weights_after_loading(head)


def model_folder(name: str) -> Path:
    """Return the folder of a model's files, also of a hub name's."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, local_files_only=True))
