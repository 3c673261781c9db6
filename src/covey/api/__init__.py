"""Python interface: `covey.train`, `covey.build`, and what they return."""
