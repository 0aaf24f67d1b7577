"""Calibration: how much of its cache every (layer, KV head) of a model needs, found offline on samples.

samples     texts to read
attention   the model's attention, watched
oracle      what each cached token of each head is worth
statistics  needs of heads, and what follows from many samples
job         all of it, resumable; command is its command line
"""
