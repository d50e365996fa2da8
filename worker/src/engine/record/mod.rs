//! Records ends: the verdict on an end, the write that records it, and the task that writes it in batches.

pub(super) mod ending;
pub(super) mod items;
mod pending;
pub(super) mod portion;
pub(crate) mod ran;
pub(super) mod recorder;
pub(super) mod verdict;
mod writer;
