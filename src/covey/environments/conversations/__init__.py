"""Small tasks of several turns, which a model of a million parameters learns from nothing."""
