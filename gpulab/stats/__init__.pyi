from .tables import read_table as read_table
from .verdicts import Verdict as Verdict
from .verdicts import verdict as verdict
