"""Tangram: a plugin of vLLM whose KV cache keeps, for every attention head, what that head needs.

Start reading at :mod:`tangram.geometry`; docs/architecture.md has the whole picture. Importing this package
or its ``geometry``, ``errors`` and ``client`` modules needs neither vLLM nor torch.
"""
