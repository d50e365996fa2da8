//! What people ask: lists, single jobs, statistics. Reads only.
