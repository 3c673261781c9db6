"""TRL's GRPOTrainer by covey: a script changes one import, `from covey.trl import GRPOConfig, GRPOTrainer`.

trl itself is not imported and need not be installed. docs/use/trl.md lists what each field becomes.
"""

from covey.trl.config import GRPOConfig
from covey.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
