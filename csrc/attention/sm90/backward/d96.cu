#include "csrc/attention/sm90/backward/launch.cuh"

// Its consumer warpgroups are those of consumer_narrow.cuh.
const jaxmagi::sm90::BackwardKernel jaxmagi::sm90::kBackwardD96 = BackwardInstance<96, 96, 64, 128, 2, 3, 2>::kKernel;
