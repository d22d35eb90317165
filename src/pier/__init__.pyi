from pier.api import Job as Job
from pier.api import Trial as Trial
from pier.endpoint import GATEWAY_PORT as GATEWAY_PORT
from pier.endpoint import Endpoint as Endpoint
from pier.errors import AgentError as AgentError
from pier.errors import ArgumentError as ArgumentError
from pier.errors import ImageError as ImageError
from pier.errors import JobError as JobError
from pier.errors import PathError as PathError
from pier.errors import PierError as PierError
from pier.errors import PolicyError as PolicyError
from pier.errors import ProviderError as ProviderError
from pier.errors import SandboxError as SandboxError
from pier.errors import StorageError as StorageError
from pier.errors import TaskError as TaskError
from pier.errors import UsageError as UsageError
from pier.errors import VerifierError as VerifierError
from pier.gateway import Budget as Budget
from pier.gateway import Gateway as Gateway
from pier.gateway import Provider as Provider
from pier.gateway import Session as Session
from pier.job.config import AgentConfig as AgentConfig
from pier.job.config import DatasetConfig as DatasetConfig
from pier.job.config import JobConfig as JobConfig
from pier.network.policy import NetworkPolicy as NetworkPolicy
from pier.record.reader import Recording as Recording
from pier.record.reader import read as _read
from pier.sandbox.contract import Backend as Backend
from pier.sandbox.contract import FileInfo as FileInfo
from pier.sandbox.contract import Limits as Limits
from pier.sandbox.contract import Mount as Mount
from pier.sandbox.contract import Process as Process
from pier.sandbox.contract import Result as Result
from pier.sandbox.contract import Sandbox as Sandbox
from pier.sandbox.contract import SandboxSpec as SandboxSpec
from pier.sandbox.opening import open_sandbox as _open_sandbox
from pier.task import Task as Task
from pier.task import load_task as load_task
from pier.trial.result import TrialResult as TrialResult

__version__: str
read_recording = _read
sandbox = _open_sandbox
