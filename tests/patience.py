"""How long tests wait for what is there in a moment on an idle machine.

They wait for conditions, so patience costs nothing where one holds; and it is no assertion about speed, since
any number of other tests may keep the machine busy.
"""

PATIENCE = 30.0
"""Seconds."""
