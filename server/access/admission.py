"""Admission control: a fair bound on the number of sequences."""

from __future__ import annotations

from dataclasses import dataclass

from server.access.caller import Caller


@dataclass
class _Tenant:
    num_live: int = 0
    weight: float = 1.0


class Admission:
    """Counts the sequences submitted to the engine, running and waiting, by tenant.

    While the bound is not reached every sequence is admitted, so a single tenant can use all of it.
    Beyond the bound, a tenant is admitted only while it has less than its weighted share among the
    tenants with sequences. So a full queue turns away the tenant that filled it, and not one with
    few requests. With ``k`` tenants the bound is exceeded at most by the factor ``1 + 1/2 + ... +
    1/k``, and only if each of them filled its share before the next one arrived.

    Args:
        max_sequences: the bound.
    """

    def __init__(self, max_sequences: int) -> None:
        self.max_sequences = max_sequences
        self.num_live = 0
        self.num_background = 0  # of batches: not counted, since their sender bounds them
        self._tenants: dict[str, _Tenant] = {}  # those with sequences

    def try_admit(self, count: int, caller: Caller) -> bool:
        """Admit ``count`` sequences; false if there is no room."""
        if caller.background:
            self.num_background += count
            return True
        if not self.can_admit(count, caller):
            return False
        tenant = self._tenants.get(caller.tenant) or _Tenant()
        self.num_live += count
        tenant.num_live += count
        tenant.weight = caller.weight
        self._tenants[caller.tenant] = tenant
        return True

    def can_admit(self, count: int, caller: Caller) -> bool:
        """Whether ``try_admit`` would admit ``count`` sequences now."""
        tenant = self._tenants.get(caller.tenant) or _Tenant()
        return (
            self.num_live + count <= self.max_sequences
            or tenant.num_live + count <= self._share(caller)
        )

    def release(self, count: int, caller: Caller) -> None:
        """Undo ``try_admit`` as sequences finish."""
        if caller.background:
            self.num_background -= count
            return
        tenant = self._tenants[caller.tenant]
        self.num_live -= count
        tenant.num_live -= count
        if not tenant.num_live:
            del self._tenants[caller.tenant]

    def _share(self, caller: Caller) -> float:
        if not self._tenants.keys() - {caller.tenant}:
            return self.max_sequences  # the only tenant
        others = sum(t.weight for name, t in self._tenants.items() if name != caller.tenant)
        return self.max_sequences * caller.weight / (others + caller.weight)
