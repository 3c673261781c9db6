"""Words around a number that say it is not the value: `5 ft 3 in` is not 5, nor `more than 5`, nor `5 or 6`."""

from covey_graders.math.reading.normalize import CURRENCY
from covey_graders.tables import patterns_beside, pieces_beside

PIECES = pieces_beside(__file__, {"currency": CURRENCY})
"""Parts of patterns by name: `or` in many languages, doubts, concessions."""
HEDGES = patterns_beside(__file__, PIECES)
