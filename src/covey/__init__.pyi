from covey import rewards as rewards
from covey.algorithm.settings import AlgorithmConfig as AlgorithmConfig
from covey.api.parts import Parts as Parts
from covey.api.parts import build as build
from covey.api.result import Result as Result
from covey.api.training import train as train
from covey.config.schema import ColdStartConfig as ColdStartConfig
from covey.config.schema import Config as Config
from covey.config.schema import EvaluationConfig as EvaluationConfig
from covey.config.schema import OutputConfig as OutputConfig
from covey.engine.settings import EngineConfig as EngineConfig
from covey.engine.settings import SamplingConfig as SamplingConfig
from covey.environments.base import Environment as Environment
from covey.environments.data.settings import DataConfig as DataConfig
from covey.policy.models.loading import load_policy as load_policy
from covey.policy.policy import Policy as Policy
from covey.policy.settings import ModelConfig as ModelConfig
from covey.rollouts.settings import CurriculumConfig as CurriculumConfig
from covey.run.evaluate import Estimate as Estimate
from covey.run.evaluate import Evaluation as Evaluation
from covey.run.records.callbacks import Callback as Callback
from covey.run.records.callbacks import StopTraining as StopTraining
from covey.trainer.settings import OptimizerConfig as OptimizerConfig
from covey.types import Batch as Batch
from covey.types import Completion as Completion
from covey.types import Failure as Failure
from covey.types import Group as Group
from covey.types import Message as Message
from covey.types import Prompt as Prompt
from covey.types import Reward as Reward
from covey.types import Rollout as Rollout
from covey.types import RunStopped as RunStopped
from covey.types import Sampling as Sampling

__version__: str
PUBLIC: dict[str, str]
