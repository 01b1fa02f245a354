"""Views: pure functions of a trace, each as text and as HTML; no model, no network."""

from __future__ import annotations

from ddlab.views.acceptance import acceptance_view
from ddlab.views.aligned import aligned_view
from ddlab.views.budgets import budgets_view, check_view
from ddlab.views.depths import depths_view
from ddlab.views.findings import findings_view
from ddlab.views.layers import layers_figure, layers_view
from ddlab.views.mask import mask_view
from ddlab.views.page import View
from ddlab.views.path import path_view
from ddlab.views.replayed import replay_view
from ddlab.views.rounds import round_text, rounds_view, trace_text
from ddlab.views.setup import setup_view
from ddlab.views.summary import summary_view
from ddlab.views.timeline import time_view
from ddlab.views.tree import tree_view

__all__ = [
    "View",
    "acceptance_view",
    "aligned_view",
    "budgets_view",
    "check_view",
    "depths_view",
    "findings_view",
    "layers_figure",
    "layers_view",
    "mask_view",
    "path_view",
    "replay_view",
    "round_text",
    "rounds_view",
    "setup_view",
    "summary_view",
    "time_view",
    "trace_text",
    "tree_view",
]
