from whywait import aio as aio
from whywait.api import Result as Result
from whywait.api import Trial as Trial
from whywait.api import ab as ab
from whywait.api import bill as bill
from whywait.api import catalog as catalog
from whywait.api import compare as compare
from whywait.api import diagnose as diagnose
from whywait.api import doctor as doctor
from whywait.api import export as export
from whywait.api import find as find
from whywait.api import history as history
from whywait.api import import_results as import_results
from whywait.api import plan as plan
from whywait.api import probe_service as probe_service
from whywait.api import quality as quality
from whywait.api import resume as resume
from whywait.api import run as run
from whywait.api import show as show
from whywait.api import simulate as simulate
from whywait.api import sweep as sweep
from whywait.api import try_technique as try_technique
from whywait.api import watch as watch
from whywait.api import what_if as what_if
from whywait.errors import WhywaitError as WhywaitError

__version__: str
