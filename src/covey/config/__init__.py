"""The settings of a run: schema, composition from YAML, and every rule between them."""
