"""The settings of a run: schema, composition, rules."""
