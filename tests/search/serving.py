"""Served by the daemons of the search: the site that the environment names."""

from __future__ import annotations

import os

import torch
from tests.search.over_workers import real_site
from tests.search.site import Cell

import gradwire_server as gws

torch.set_num_threads(1)

site = real_site(os.environ["SITE"])
for function in site.functions:
    gws.expose(function)
gws.expose(Cell)
