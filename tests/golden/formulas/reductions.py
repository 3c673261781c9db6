"""How terms become one number."""

from collections.abc import Sequence

from .advantages import Inputs
from .exact import MP, Expected, Params, Real, mean, over, valid


def row_weights(counts: Sequence[int], params: Params) -> list[Real]:
    """Return what the sum of each row's terms is multiplied by; denominators are at least 1."""
    mode = params.get("mode") or params["aggregation"]
    rows = len(counts) if params.get("count_empty") else sum(n > 0 for n in counts)
    rows, tokens = max(rows, 1), max(sum(counts), 1)
    length = params.get("norm_length") or 1
    own = {
        "token_mean": lambda n: over(1, tokens),
        "seq_mean_token_mean": lambda n: over(1, max(n, 1) * rows),
        "seq_mean": lambda n: over(1, max(n, 1) * rows),
        "seq_sum": lambda n: over(1, max(n, 1)),
        "seq_mean_token_sum": lambda n: over(1, rows),
        "seq_mean_token_sum_norm": lambda n: over(1, rows * length),
        "token_sum": lambda n: MP.mpf(1),
        "seq_sum_token_sum": lambda n: MP.mpf(1),
        "token_sum_norm": lambda n: over(1, length),
    }[mode]
    return [own(n) for n in counts]


def reduced(values: Sequence[Sequence[Real]], mask: Sequence[Sequence[int]], weights: Sequence[Real]) -> Real:
    """Return the weighted sum of row sums."""
    return sum((weights[i] * values[i][t] for i, t in valid(mask)), MP.mpf(0))


def aggregation(params: Params, inputs: Inputs) -> Expected:
    """Return the number, and its derivative, which is the weight of each token."""
    mask = inputs["mask"]
    weights = row_weights([sum(row) for row in mask], params)
    slopes = [[weights[i] * counts for counts in row] for i, row in enumerate(mask)]
    return {"loss": reduced(inputs["values"], mask, weights), "grad": slopes}


def accumulation(params: Params, inputs: Inputs) -> Expected:
    """Return losses of micro-batches, which add up, and of ranks, which average, to the loss of the batch."""
    mask, ranks = inputs["mask"], params["dp_size"]
    counts = [sum(row) for row in mask]
    weights = row_weights(counts, params)
    share = [sum(weights[i] * inputs["values"][i][t] for j, t in valid(mask) if j == i) for i in range(len(mask))]
    micro = [sum((share[i] for i in rows), MP.mpf(0)) for rows in inputs["micro_batches"]]
    of_ranks = [ranks * sum((share[i] for i in rows), MP.mpf(0)) for rows in inputs["ranks"]]
    return {
        "loss": sum(share, MP.mpf(0)),
        "micro_losses": micro,
        "sum_of_micro_losses": sum(micro),
        "rank_losses": of_ranks,
        "mean_of_rank_losses": mean(of_ranks),
        "global_tokens": sum(counts),
        "global_sequences": sum(n > 0 for n in counts),
        "naive_mean_of_local_means": mean([_alone(params, inputs, rows) for rows in inputs["micro_batches"]]),
    }


def _alone(params: Params, inputs: Inputs, rows: Sequence[int]) -> Real:
    """Return the loss of a micro-batch that counts only itself."""
    local = {name: [inputs[name][i] for i in rows] for name in ("values", "mask")}
    return aggregation(params, local)["loss"]
