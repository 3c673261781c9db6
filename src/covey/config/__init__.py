"""The settings of a run: schema, composition from YAML, and rules between them."""
