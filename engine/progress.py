"""Progress bars of the offline ``LLM``, shown at a terminal."""

from __future__ import annotations

import time
from typing import Self

from engine.driver import Choice, Driver


def run_to_completion(driver: Driver, groups: list[list[Choice]], use_tqdm: bool) -> None:
    """Step the engine until every group is finished."""
    from tqdm import tqdm

    group_of = {choice.request.id: index for index, group in enumerate(groups) for choice in group}
    num_left = [len(group) for group in groups]
    num_tokens = 0
    started_s = time.monotonic()
    # disable=None: show the bar at a terminal only.
    with tqdm(total=len(groups), unit="prompt", disable=None if use_tqdm else True) as bar:
        while any(num_left):
            for choice in driver.step():
                group = group_of.get(choice.request.id)
                if group is None:
                    continue  # belongs to a stream that runs beside this call
                num_left[group] -= 1
                num_tokens += len(choice.token_ids)
                rate = num_tokens / (time.monotonic() - started_s)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                bar.update(not num_left[group])


class LoadingBar:
    """A progress bar for loading."""

    def __init__(self, enabled: bool) -> None:
        from tqdm import tqdm

        form = "{desc:<28} {percentage:3.0f}%|{bar}| {elapsed}"
        self._bar = tqdm(
            total=1.0, desc="loading", bar_format=form, disable=None if enabled else True
        )

    def __call__(self, fraction: float, what: str) -> None:
        """Show the current activity and the fraction done."""
        self._bar.set_description_str(what, refresh=False)
        self._bar.update(fraction - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
