"""Names of the package covey_sandbox, which runs programs that a model wrote."""

from covey_sandbox import *  # noqa: F403
from covey_sandbox import __all__ as __all__
