#include "csrc/attention/sm90/backward/launch.cuh"

// Its consumer warpgroups are those of consumer_wide.cuh.
const jaxmagi::sm90::BackwardKernel jaxmagi::sm90::kBackwardD192 = BackwardInstance<192, 192, 64, 96, 3, 2, 1>::kKernel;
