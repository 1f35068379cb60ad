"""How many sequences are taken on at once, and by whom: a queue with a bound that is fair."""

from __future__ import annotations

from dataclasses import dataclass

from server.access.caller import Caller


@dataclass
class _Tenant:
    live: int = 0
    weight: float = 1.0


class Admission:
    """Counts the sequences in the engine's hands, running and waiting, by tenant.

    Whoever comes while there is room is taken on, so that one tenant alone may use all of it.
    Beyond the bound a tenant is taken on as long as it has less than its share, by weight, among
    those that have any: so a full queue turns away the tenant that filled it, and not the one that
    comes now and then. With ``k`` tenants the bound is exceeded at most by the factor
    ``1 + 1/2 + ... + 1/k``, and only if each of them has filled its share before the next came.

    Args:
        most: the bound.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.live = 0
        self.background = 0  # of batches, which take nobody's place and are bounded by their sender
        self._tenants: dict[str, _Tenant] = {}  # those with sequences

    def take(self, count: int, caller: Caller) -> bool:
        """Take ``count`` sequences on, or say that there is no room for them."""
        if caller.background:
            self.background += count
            return True
        if not self.has_room(count, caller):
            return False
        tenant = self._tenants.get(caller.tenant) or _Tenant()
        self.live += count
        tenant.live += count
        tenant.weight = caller.weight
        self._tenants[caller.tenant] = tenant
        return True

    def has_room(self, count: int, caller: Caller) -> bool:
        """Whether ``take`` would take ``count`` sequences on now."""
        tenant = self._tenants.get(caller.tenant) or _Tenant()
        return self.live + count <= self.most or tenant.live + count <= self._share(caller)

    def give_back(self, count: int, caller: Caller) -> None:
        """Undo ``take`` as sequences end."""
        if caller.background:
            self.background -= count
            return
        tenant = self._tenants[caller.tenant]
        self.live -= count
        tenant.live -= count
        if not tenant.live:
            del self._tenants[caller.tenant]

    def _share(self, caller: Caller) -> float:
        if not self._tenants.keys() - {caller.tenant}:
            return self.most  # alone
        others = sum(t.weight for name, t in self._tenants.items() if name != caller.tenant)
        return self.most * caller.weight / (others + caller.weight)
