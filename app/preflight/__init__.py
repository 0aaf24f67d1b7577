"""A look at the host before anything is started: what cannot work is said plainly, with a code of its own.

``problems`` are the codes, ``probes`` ask the host, ``checks`` judge what they found, ``start`` does it all.
"""
