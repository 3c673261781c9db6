"""Call all that the service offers through the official client; print what two runs must share, as JSON.

Run by `.venv-tinker`, the client's own environment.
"""

import json
import pickle
import sys
import warnings
from typing import Any

import tinker
import torch
from tinker import types

warnings.simplefilter("ignore")

NAME = "Qwen/Qwen3-8B"
TEXTS = ["The capital of France is Paris.", "Two plus two is four."]


def done(future: Any) -> Any:
    return future.result() if hasattr(future, "result") else future


def main() -> None:
    service = tinker.ServiceClient()
    training = done(service.create_lora_training_client(base_model=NAME, rank=4, seed=1))
    tokenizer = training.get_tokenizer()
    seen: dict[str, Any] = {}

    def datum(text: str, **inputs: Any) -> types.Datum:
        ids = tokenizer.encode(text)
        count = len(ids) - 1
        given = {name: [value] * count for name, value in inputs.items()}
        return types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:], **given}
        )

    data = [datum(text, weights=1.0) for text in TEXTS]
    sampled = [datum(text, logprobs=-3.0, advantages=0.5) for text in TEXTS]
    masked = [datum(text, logprobs=-3.0, advantages=0.5, sequence_ratio_mask=1.0) for text in TEXTS]
    seen["forward"] = training.forward(data, "cross_entropy").result().metrics["loss:sum"]
    clip = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    calls = [("cross_entropy", data, None), ("importance_sampling", sampled, None), ("ppo", sampled, clip)]
    calls += [("cispo", sampled, clip), ("dro", sampled, {"beta": 0.05}), ("gspo", masked, clip)]
    for loss, given, config in calls:
        found = training.forward_backward(given, loss, loss_fn_config=config).result()
        seen[loss] = found.metrics["loss:sum"]
        assert [len(one["logprobs"].data) for one in found.loss_fn_outputs] == [
            len(one.loss_fn_inputs["target_tokens"].data) for one in given
        ]

    def squares(_: Any, logprobs: Any) -> Any:
        loss = sum((one * one).sum() for one in logprobs)
        return loss, {"squares": float(loss)}

    seen["custom"] = training.forward_backward_custom(data, squares).result().metrics["squares"]
    ids = tokenizer.encode(TEXTS[0])
    targets = torch.tensor([[token, 5, 7] for token in ids[1:]])
    weights = torch.tensor([[1.0, 0.0, 0.5]] * len(targets))
    dense = {"target_tokens": types.TensorData.from_torch(targets), "weights": types.TensorData.from_torch(weights)}
    sparse = {
        "target_tokens": types.TensorData.from_torch_sparse(targets * (weights != 0)),
        "weights": types.TensorData.from_torch_sparse(weights),
    }
    both = [
        types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=each) for each in (dense, sparse)
    ]
    seen["dense"], seen["sparse"] = [
        training.forward_backward([one], "cross_entropy").result().metrics["loss:sum"] for one in both
    ]
    seen["norm"] = training.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics["grad_norm"]
    for bad in ("stable_reinforce",):
        try:
            training.forward_backward(sampled, bad).result()
        except tinker.RequestFailedError as error:
            seen["refused"] = "importance_sampling" in str(error)
    saved = training.save_state("a").result().path
    sampler = done(training.save_weights_and_get_sampling_client())
    prompt = types.ModelInput.from_ints(tokenizer.encode("The capital of France is"))
    params = types.SamplingParams(max_tokens=6, temperature=1.0)
    found = sampler.sample(prompt, 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    seen["samples"] = [one.tokens for one in found.sequences]
    assert all(len(one.tokens) == len(one.logprobs) for one in found.sequences)
    assert found.prompt_logprobs[0] is None
    seen["single"] = [sampler.sample(prompt, 1, params) for _ in range(8)]
    seen["single"] = [one.result().sequences[0].tokens for one in seen["single"]]
    copy = pickle.loads(pickle.dumps(sampler))
    seen["copy"] = copy.compute_logprobs(prompt).result()
    named = training.save_weights_for_sampler("b").result().path
    other = done(service.create_sampling_client(model_path=named))
    seen["named"] = other.compute_logprobs(prompt).result()
    assert seen["named"] == seen["copy"]
    base = done(service.create_sampling_client(base_model=NAME))
    seen["base"] = base.compute_logprobs(prompt).result()
    assert seen["base"] != seen["copy"]
    training.load_state_with_optimizer(saved).result()
    again = done(service.create_training_client_from_state_with_optimizer(saved))
    seen["loaded"] = [one.forward(data, "cross_entropy").result().metrics["loss:sum"] for one in (training, again)]
    assert seen["loaded"][0] == seen["loaded"][1]
    rest = service.create_rest_client()
    model = training.get_info().model_id
    assert [one.checkpoint_id for one in rest.list_checkpoints(model).result().checkpoints] == [
        "weights/a",
        "sampler_weights/b",
    ]
    assert rest.get_training_run(model).result().lora_rank == 4
    assert rest.list_training_runs().result().cursor.total_count >= 2
    assert rest.get_weights_info_by_tinker_path(saved).result().base_model == NAME
    rest.delete_checkpoint_from_tinker_path(named).result()
    assert all(one.checkpoint_id != "sampler_weights/b" for one in rest.list_checkpoints(model).result().checkpoints)
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
