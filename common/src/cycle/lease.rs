//! The recruiter's lease: one document in `metadata` that names the leader.
//!
//! No process compares wall clocks. A standby takes over after it has observed the same renewal for the whole lease, or
//! at once when the lease was released. The holder trusts its own renewal for a shorter time, on its own monotonic
//! clock. The safety of jobs never depends on the lease.

use std::time::Duration;

use bson::{Bson, Document, RawDocumentBuf, doc};

use crate::{
    base::{Instant, LeaseTerm, WorkerId, integer},
    mongo::{Store, StoreError, call, readable, update::increased},
    roster::term_in,
};

const LEASE: &str = "recruiter";

/// The lease as it was read, for comparison with a later read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observed {
    /// Grows by one with each new holder. Zero if the document has none that can be one.
    pub term: LeaseTerm,
    /// Grows by one with each renewal.
    pub renewals: i64,
    /// Whether the holder has released it.
    pub released: bool,
    /// How long the holder may be silent before a standby takes over, in milliseconds: the holder's `--lease`. A leader
    /// of an earlier release does not write it.
    pub lease_ms: u32,
    /// The holder as `host:pid`, for display.
    pub holder_at: String,
    /// When it was last renewed, by the server's clock. For display only; no decision depends on it.
    pub renewed_at: Option<Instant>,
    /// The fields that tell one renewal from another, as they are stored.
    pub as_read: Document,
}

/// The fields that tell one renewal from another.
const TOLD_BY: [&str; 3] = ["term", "renewals", "released"];

impl Observed {
    /// How long the holder may be silent before a standby takes over.
    pub fn duration(&self) -> Duration {
        Duration::from_millis(self.lease_ms.into())
    }

    /// Field by field: one that has a wrong type counts as missing, so that a standby takes such a lease over when nothing renews it.
    fn of(lease: &Document) -> Self {
        let as_read = TOLD_BY.map(|field| (field.to_owned(), lease.get(field).cloned().unwrap_or(Bson::Null)));
        Self {
            term: term_in(lease).unwrap_or_default(),
            renewals: integer(lease.get("renewals")).unwrap_or_default(),
            released: lease.get_bool("released").unwrap_or_default(),
            lease_ms: integer(lease.get("lease_ms")).and_then(|ms| u32::try_from(ms).ok()).unwrap_or_default(),
            holder_at: lease.get_str("holder_at").unwrap_or_default().to_owned(),
            renewed_at: lease.get_datetime("renewed_at").ok().map(|at| at.to_chrono()),
            as_read: as_read.into_iter().collect(),
        }
    }

    /// The condition that a field is as it was read. The bytes of a text may be no UTF-8, so it is compared by its type.
    fn unchanged(&self, field: &str) -> Bson {
        let value = self.as_read.get(field).cloned().unwrap_or(Bson::Null);
        if value.as_str().is_some() { doc! { "$type": "string" }.into() } else { value }
    }
}

/// A held lease. Only its holder can renew and release it.
#[derive(Clone, Debug)]
pub struct LeaderLease {
    holder: WorkerId,
    /// The term.
    pub term: LeaseTerm,
}

impl Store {
    /// The current lease; `None` before the first leader.
    ///
    /// Filter: the lease. Index: `_id`. Invariant: I10.
    pub async fn observe_lease(&self) -> Result<Option<Observed>, StoreError> {
        let metadata = self.metadata.clone_with_type::<RawDocumentBuf>();
        let found = call("observe_lease", async move { metadata.find_one(doc! { "_id": LEASE }).await }).await?;
        Ok(found.map(|lease| Observed::of(&readable(&lease))))
    }

    /// Takes the lease for a new term.
    ///
    /// Filter: still as observed. Update: holder, its `duration`, next term. The next term follows the highest in the lease, the roster and
    /// `metadata`: workers with a later term would get no assignments, and cells of rates with one could not be kept. Index: `_id`.
    /// Invariant: one leader in each term.
    /// Loses when the holder has renewed the lease, or another standby has acquired it.
    pub async fn acquire_if_unchanged(
        &self,
        observed: Option<&Observed>,
        holder_at: &str,
        duration: Duration,
    ) -> Result<Option<LeaderLease>, StoreError> {
        let holder = WorkerId::new();
        let last = observed.map_or_else(LeaseTerm::default, |lease| lease.term).max(self.highest_term().await?);
        let term = LeaseTerm(last.0 + 1);
        let filter = match observed {
            Some(lease) => {
                let [term, renewals, released] = TOLD_BY.map(|field| lease.unchanged(field));
                doc! { "_id": LEASE, "term": term, "renewals": renewals, "released": released }
            }
            // The document is missing.
            None => doc! { "_id": LEASE, "term": null },
        };
        let lease_ms = i64::from(u32::try_from(duration.as_millis()).unwrap_or(u32::MAX));
        let set = doc! { "lease_ms": lease_ms, "holder": holder, "holder_at": holder_at, "term": term, "renewals": 0_i64, "released": false, "acquired_at": self.now() };
        let update = doc! { "$set": set, "$currentDate": { "renewed_at": true } };
        let metadata = self.metadata.clone();
        let absent = observed.is_none();
        match call("acquire_if_unchanged", async move { metadata.update_one(filter, update).upsert(absent).await }).await {
            Ok(written) => {
                let is_acquired = written.matched_count == 1 || written.upserted_id.is_some_and(|id| id != Bson::Null);
                if is_acquired {
                    self.tell_plain("leader.changed", doc! { "leader": holder_at, "term": term });
                }
                Ok(is_acquired.then_some(LeaderLease { holder, term }))
            }
            Err(failed) if failed.is_duplicate() => Ok(None),
            Err(failed) => Err(failed),
        }
    }

    /// Renews a held lease.
    ///
    /// Filter: this holder, this term, not released. Index: `_id`. Invariant: one leader in each term.
    /// Loses when another recruiter has become the leader.
    pub async fn renew_if_held(&self, lease: &LeaderLease) -> Result<bool, StoreError> {
        let metadata = self.metadata.clone();
        let filter = doc! { "_id": LEASE, "holder": lease.holder, "term": lease.term, "released": false };
        let renewed = call("renew_if_held", async move {
            let renewal = doc! { "$set": { "renewals": increased("renewals", 1), "renewed_at": "$$NOW" } };
            metadata.update_one(filter, vec![renewal]).await
        })
        .await?;
        Ok(renewed.matched_count == 1)
    }

    /// Releases a held lease, so that a standby takes over at once.
    ///
    /// Filter: this holder, this term. Index: `_id`. Invariant: one leader in each term.
    pub async fn release_if_held(&self, lease: &LeaderLease) -> Result<(), StoreError> {
        let metadata = self.metadata.clone();
        let filter = doc! { "_id": LEASE, "holder": lease.holder, "term": lease.term };
        call("release_if_held", async move { metadata.update_one(filter, doc! { "$set": { "released": true } }).await }).await.map(drop)
    }
}
