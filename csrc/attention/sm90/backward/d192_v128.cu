#include "csrc/attention/sm90/backward/launch.cuh"

// Its consumer warpgroups are those of consumer_wide.cuh.
const jaxmagi::sm90::BackwardKernel jaxmagi::sm90::kBackwardD192V128 =
    BackwardInstance<192, 128, 64, 96, 3, 2, 2>::kKernel;
