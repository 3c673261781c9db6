"""What ails a run, said from its numbers alone: rules over the columns of its logs, each with its evidence."""
