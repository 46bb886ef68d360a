"""All cases of gradients, of every family of operators."""

from __future__ import annotations

from tests.support.gradients import elementwise_rows, layer_rows, moving_rows, recurrent_rows

ROWS = (*elementwise_rows.ROWS, *moving_rows.ROWS, *layer_rows.ROWS, *recurrent_rows.ROWS)
