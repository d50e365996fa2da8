//! Backlog caps: how many jobs may wait in a group.
//!
//! The settings are cached for about a second, so most calls ask MongoDB
//! nothing. In a group with a cap, a count of the waiting jobs grants this process a part of the free room, which it uses without another
//! count. So the cap is approximate:
//!
//! - Of several processes, each uses at most a sixteenth of the room that it has counted (or what one call needs) before it counts again,
//!   for a second at most. Up to sixteen processes exceed the cap only by the jobs of calls that count at the same time.
//! - A new or lower cap takes effect within about a second.
//! - Retries, rescues and inserts of other programs are not limited.

use std::{collections::BTreeMap, time::Instant as Monotonic};

use super::error::EnqueueError;
use crate::store::{Store, StoreError};

impl Store {
    /// Checks that so many further jobs may wait in these groups.
    pub(crate) async fn admit(&self, jobs: &BTreeMap<String, u64>) -> Result<(), EnqueueError> {
        let now = Monotonic::now();
        if self.caps.must_read(now) {
            self.read_caps(now).await?;
        }
        for (group, jobs) in jobs {
            let Some(cap) = self.caps.known().caps.get(group).copied() else { continue };
            let taken = self.caps.known().take(group, *jobs, now);
            let fits = match taken {
                Some(fits) => fits,
                None => {
                    let free = cap.saturating_sub(self.waiting_in(group, cap + 1).await?);
                    self.caps.known().note(group, *jobs, free, Monotonic::now())
                }
            };
            if !fits {
                return Err(EnqueueError::BacklogFull { group: group.clone(), most_waiting: cap });
            }
        }
        Ok(())
    }

    async fn read_caps(&self, now: Monotonic) -> Result<(), StoreError> {
        match self.group_backlogs().await {
            Ok(settings) => {
                let caps = settings.into_iter().filter_map(|settings| Some((settings.group, settings.most_waiting?)));
                self.caps.set(caps.collect(), now);
                Ok(())
            }
            Err(error) => {
                // The next call reads them.
                self.caps.known().read_at = None;
                Err(error)
            }
        }
    }
}
