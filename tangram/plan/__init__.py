"""Sizing: how many conversations of which length fit a card, from the formula and a model's configuration.

``cards`` and ``known`` are facts, ``facts`` reads a model's configuration, ``sizing`` works it out,
``command`` is ``tangram plan``. Nothing here needs torch, vLLM or a GPU.
"""
