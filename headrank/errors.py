"""The one exception that users see as a message instead of a traceback."""


class HeadrankError(Exception):
    """Something that the user can mend: the text says what, where and what to do, in one to three lines.

    Anything else that is raised is a fault of headrank and keeps its traceback.
    """


class NotFiniteError(HeadrankError):
    """A tensor of one layer holds NaN or infinity: that layer has no numbers, the others do."""
