"""Problems that a model solves sometimes: a correct system learns them all, a broken one cannot (arXiv 2510.26788)."""
