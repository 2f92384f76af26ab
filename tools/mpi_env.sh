# The environment of every `mpirun` of this project; to be sourced: . tools/mpi_env.sh
#
# The one place that holds it: the Makefile sources it, tests read it through tools/mpi_env.py. What
# is already set stays. RANKS (8 where unset) is the most ranks that will be started.

# Open MPI refuses to start as root unless told twice.
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT="${OMPI_ALLOW_RUN_AS_ROOT:-1}"
    export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-1}"
fi

# It also refuses more ranks than cores, and a core may show as two processors. The first variable
# is read by Open MPI 5, the second by 4.
if [ "$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)" -lt "$((2 * ${RANKS:-8}))" ]; then
    export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}"
    export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe:-1}"
fi

# Its one-sided component over UCX fails on machines without a fast network.
export OMPI_MCA_osc="${OMPI_MCA_osc:-^ucx}"

# One BLAS thread per rank: 4 ranks x all cores each were 4 to 15 times slower on 2 cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"
export MKL_NUM_THREADS="${MKL_NUM_THREADS:-1}"
