"""Problems with one right answer, and the verifiers that judge answers."""
