"""Conditions that make settings of several rooms be read."""

from covey.system.setting import Requires

CAUSAL = Requires("model.kind = causal", ("model.kind",), lambda kind: kind == "causal")
CONTINUES = Requires("a policy that continues its prompts, model.kind = causal", ("model.kind",), CAUSAL.holds)
FILLS_IN = Requires("a policy that fills in, model.kind = masked", ("model.kind",), lambda kind: kind == "masked")
