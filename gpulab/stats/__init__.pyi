from ._tables import read_table as read_table
from ._verdict import Verdict as Verdict
from ._verdict import verdict as verdict
