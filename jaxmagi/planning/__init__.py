"""Context plans: chunks to ranks, bands, transfer tables and reports.

Planning runs on the host only, as pure functions of masks and options. ``csrc/planning`` assigns chunks to
ranks and makes the tables, in integers; floating point appears only in predicted times, in operations that
are elementwise or have a fixed order, so that every host makes the same plan.
"""

from ._capacity import PlanCapacity as PlanCapacity
from ._cost import CostModel as CostModel, num_parts as num_parts
from ._levels import LevelChoice as LevelChoice
from ._plan import ContextPlan as ContextPlan
from ._plan_context import plan_context as plan_context, plan_contexts as plan_contexts
from ._prefetch import PlanPrefetcher as PlanPrefetcher, prefetch_plans as prefetch_plans
from ._report import LinkTraffic as LinkTraffic, PlanReport as PlanReport
from ._spec import GroupCastSpec as GroupCastSpec, RelayedSpec as RelayedSpec
