"""The shape of what a run trains: of known and local models, and of the embedded one."""

from covey.policy.settings import NANO, ModelConfig
from covey.run.planner.model_shapes import Shape, counted, shape_of


def shape_for(model: ModelConfig) -> Shape:
    """Return the shape of a model. ValueError where neither its name nor a folder says what it is."""
    found = _embedded(model) if model.name in NANO else shape_of(model)
    if found is None:
        raise ValueError(
            f"the shape of model.name={model.name} is not known here; "
            "name a folder with its config.json (weights are not needed)"
        )
    return found


def _embedded(model: ModelConfig) -> Shape:
    import torch

    from covey.policy.attention.base import register
    from covey.policy.models.nano import NanoShape, nano_model, nano_tokenizer
    from covey.policy.models.nano_masked import nano_masked_model, nano_masked_tokenizer

    wanted = NanoShape(model.nano_architecture, model.nano_hidden_size, model.nano_num_layers, model.nano_num_heads)
    make, tokenizer = (
        (nano_model, nano_tokenizer()) if model.kind == "causal" else (nano_masked_model, nano_masked_tokenizer())
    )
    register()
    with torch.device("meta"):
        return counted(make(wanted, tokenizer, 0))
