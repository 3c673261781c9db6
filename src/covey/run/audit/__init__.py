"""Audit a grader before a policy does: right answers respelt, and what graders are known to fall for."""
