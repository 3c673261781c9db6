"""What a program uses: `covey.train`, `covey.build`, and what they return."""
