//! The operations of MongoDB and the clocks that a round uses. [`Store`] implements them, and so does the model, with a database in memory.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Instant as Monotonic,
};

use recruiter_common::{
    Client,
    ids::{LeaseTerm, RoundId, WorkerId},
    instant::Instant,
    limits::{Pause, Settings},
    store::{AvailableWorker, Channel, DueJobs, FastLimits, Head, Hint, Lane, PermitHolder, Planned, RateCell, Store, StoreError},
};

/// Number of further jobs per slot that a search asks for, so that the next rounds need not search.
const SURPLUS_PER_SLOT: usize = 3;

/// Declares the operations of a round. Each is the operation of [`Store`] with this name.
macro_rules! operations {
    ($(async fn $name:ident(&self $(, $argument:ident: $of:ty)*) -> $answer:ty;)*) => {
        /// What a round uses.
        pub(crate) trait Database {
            /// The server's time.
            fn now(&self) -> Instant;

            /// The monotonic clock of this process.
            fn monotonic(&self) -> Monotonic {
                Monotonic::now()
            }

            /// Number of further jobs per slot that a search asks for.
            fn surplus_per_slot(&self) -> usize {
                SURPLUS_PER_SLOT
            }

            /// Whether this worker gets its hints without a channel.
            fn is_linked(&self, _worker: WorkerId) -> bool {
                false
            }

            $(async fn $name(&self $(, $argument: $of)*) -> $answer;)*
        }

        impl Database for Store {
            fn now(&self) -> Instant {
                Client::now(self)
            }

            fn is_linked(&self, worker: WorkerId) -> bool {
                self.is_linked(worker)
            }

            $(async fn $name(&self $(, $argument: $of)*) -> $answer {
                self.$name($($argument),*).await
            })*
        }
    };
}

operations! {
    async fn available_workers(&self, term: LeaseTerm) -> Result<Vec<AvailableWorker>, StoreError>;
    async fn rounds_of(&self, workers: &[WorkerId]) -> Result<HashMap<WorkerId, Option<RoundId>>, StoreError>;
    async fn channels(&self) -> Result<BTreeSet<Channel>, StoreError>;
    async fn ungated_groups(&self) -> Result<BTreeSet<String>, StoreError>;
    async fn gated_groups(&self) -> Result<BTreeSet<String>, StoreError>;
    async fn waiting_lanes(&self) -> Result<BTreeMap<Lane, Instant>, StoreError>;
    async fn lanes_of(&self, group: &str, most: usize) -> Result<(Vec<Lane>, bool), StoreError>;
    async fn gated_lanes_of(&self, group: &str) -> Result<Vec<Lane>, StoreError>;
    async fn due_jobs(&self, lanes: &[Lane], until: Instant, limit: usize) -> Result<DueJobs, StoreError>;
    async fn due_jobs_of_each(&self, lanes: &[(Lane, usize)], until: Instant) -> Result<Vec<DueJobs>, StoreError>;
    async fn heads_of_lines(&self, gates: &[&str]) -> Result<HashMap<String, Head>, StoreError>;
    async fn halted_lines(&self, gates: &[&str]) -> Result<HashMap<String, Pause>, StoreError>;
    async fn settings(&self) -> Result<Settings, StoreError>;
    async fn prepare_limited_jobs(&self) -> Result<(), StoreError>;
    async fn keep_cells(&self, term: LeaseTerm, cells: &[(String, RateCell)], fast: Option<&FastLimits>) -> Result<bool, StoreError>;
    async fn permit_holders(&self) -> Result<Vec<PermitHolder>, StoreError>;
    async fn running_without_permit(&self, groups: &[String]) -> Result<HashMap<String, u64>, StoreError>;
    async fn assign_if_available(&self, term: LeaseTerm, round: RoundId, planned: &[Planned]) -> Result<Vec<WorkerId>, StoreError>;
    async fn announce_hints_to(&self, hints: Vec<(Channel, Hint)>) -> bool;
}
