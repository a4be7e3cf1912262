"""Steps of a stack of layers whose outputs and selections a test compares."""

import numpy as np


class Steps:
    """Runs `layers` as requests are scheduled; subclasses have `step`, `selection` and `picks`."""

    def keep_picks(self, layer, scheduled):
        """Remember what each token of a step selected in the layer of this number."""
        chosen = self.selection.topk_indices
        chosen, row = chosen if isinstance(chosen, np.ndarray) else chosen.get(), 0
        for request, first, count in scheduled:
            for position in range(first, first + count):
                self.picks[layer][request][position] = chosen[row].copy()
                row += 1

    def run(self, request, splits):
        """Outputs [layers, tokens, hidden] of a request, in steps of these numbers of tokens."""
        first, parts = 0, []
        for count in splits:
            parts += self.step([(request, first, count)])
            first += count
        return np.concatenate(parts, axis=1)
