"""Conversations as files: what is written out, and what is taken in from other programs."""
