//! Backlog caps: how many jobs may wait in a group, or with the same gate.
//!
//! The settings are cached for about a second, so most calls ask MongoDB
//! nothing. Where there is a cap, a count of the waiting jobs grants this process a part of the free room, which it uses without another
//! count. So the cap is approximate:
//!
//! - Of several processes, each uses at most a sixteenth of the room that it has counted (or what one call needs) before it counts again,
//!   for a second at most. Up to sixteen processes exceed the cap only by the jobs of calls that count at the same time.
//! - A new or lower cap takes effect within about a second.
//! - Retries, rescues, the jobs of schedules and consumer groups, and inserts of other programs are not limited.

use std::time::Instant as Monotonic;

use super::{EnqueueError, insert::Prepared};
use crate::{
    job::resource_of_group,
    mongo::{Store, StoreError},
};

impl Store {
    /// Checks that these jobs may wait.
    pub(super) async fn admit(&self, Prepared { groups, gates, .. }: &Prepared) -> Result<(), EnqueueError> {
        let now = Monotonic::now();
        if self.caps().must_read(now) {
            self.read_caps(now).await?;
        }
        for (group, jobs) in groups {
            let backlog = resource_of_group(group);
            let Some(most_waiting) = self.caps().known().caps.get(&backlog).copied().flatten() else { continue };
            if !self.has_room(&backlog, *jobs, most_waiting, self.waiting_in(group, most_waiting + 1)).await? {
                return Err(EnqueueError::BacklogFull { group: group.clone(), most_waiting });
            }
        }
        for (gate, jobs) in gates {
            let cap = self.caps().known().of_gate(gate).map(|(limit, most)| (limit.to_owned(), most));
            let Some((limit, most_waiting)) = cap else { continue };
            if !self.has_room(gate, *jobs, most_waiting, self.waiting_at(gate, most_waiting + 1)).await? {
                return Err(EnqueueError::GateFull { gate: gate.clone(), limit, most_waiting });
            }
        }
        Ok(())
    }

    /// Whether this backlog has room for so many jobs: by an earlier count, or by this one.
    async fn has_room(
        &self,
        backlog: &str,
        jobs: u64,
        cap: u64,
        count: impl Future<Output = Result<u64, StoreError>>,
    ) -> Result<bool, StoreError> {
        let taken = self.caps().known().take(backlog, jobs, Monotonic::now());
        if let Some(fits) = taken {
            return Ok(fits);
        }
        let free = cap.saturating_sub(count.await?);
        Ok(self.caps().known().note(backlog, jobs, free, Monotonic::now()))
    }

    async fn read_caps(&self, now: Monotonic) -> Result<(), StoreError> {
        match tokio::try_join!(self.group_backlogs(), self.limit_backlogs()) {
            Ok((groups, limits)) => {
                let groups = groups.into_iter().map(|group| (resource_of_group(&group.group), group.most_waiting));
                self.caps().set(groups.chain(limits).collect(), now);
                Ok(())
            }
            Err(error) => {
                // The next call reads them.
                self.caps().known().read_at = None;
                Err(error)
            }
        }
    }
}
