"""Every private or recent torch API this package uses.

CI tests torch 2.13, and torch 2.11 must work (`make test-oldest`): a name that either
lacks has a fallback, with the version beside it.  Nothing outside
this sub-package reaches into `torch._*` (a test enforces it), so that a new torch
breaks one place.  Nothing here changes global state outside the call that asks for it.
The rest of the package asks for the public names of the files below as `compat.NAME`.
"""

from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autoamp.compat.backends import *
from autoamp.compat.calls import *
from autoamp.compat.compiled_forward import *
from autoamp.compat.custom_functions import *
from autoamp.compat.device import *
from autoamp.compat.distributed import *
from autoamp.compat.dtensors import *
from autoamp.compat.exporting import *
from autoamp.compat.frames import *
from autoamp.compat.free_sizes import *
from autoamp.compat.gradients import *
from autoamp.compat.inductor import *
from autoamp.compat.layers import *
from autoamp.compat.limits import *
from autoamp.compat.modes import *
from autoamp.compat.module_paths import *
from autoamp.compat.patches import *
from autoamp.compat.running_trace import *
from autoamp.compat.tensors import *
from autoamp.compat.traced_calls import *
from autoamp.compat.tracing import *
from autoamp.compat.transforms import *
from autoamp.compat.user_frames import *
