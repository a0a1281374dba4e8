"""Context plans: chunks to ranks, bands to stages, transfer tables and reports.

Host only: pure functions of masks and options. ``csrc/planning`` deals chunks and makes the tables, in
integers; floating point appears only in predicted times, in operations that are elementwise or have a fixed
order, so that every host makes the same plan.
"""

from ._capacity import PlanCapacity as PlanCapacity
from ._cost import CostModel as CostModel
from ._plan import ContextPlan as ContextPlan, PlanStages as PlanStages
from ._plan_context import plan_context as plan_context
from ._plan_contexts import plan_contexts as plan_contexts
from ._prefetch import PlanPrefetcher as PlanPrefetcher, prefetch_plans as prefetch_plans
from ._relayed_spec import RelayedSpec as RelayedSpec
from ._report import PlanReport as PlanReport
from ._spec import GroupCastSpec as GroupCastSpec
