"""Served by the daemons of these tests: the place that the environment names."""

from __future__ import annotations

import os

import torch
from tests.autograd.places import remote_place
from tests.faults.carriers import cut

import gradwire_server as gws

torch.set_num_threads(1)

place = remote_place(os.environ["PLACE"])
for function in (*place.functions, cut):
    gws.expose(function)
