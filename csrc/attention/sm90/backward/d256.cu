#include "csrc/attention/sm90/backward/launch.cuh"

// Its consumer warpgroups are those of consumer_wide.cuh.
const jaxmagi::sm90::BackwardKernel jaxmagi::sm90::kBackwardD256 = BackwardInstance<256, 256, 64, 64, 2, 2, 1>::kKernel;
