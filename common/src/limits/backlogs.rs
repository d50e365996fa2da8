//! How many jobs may wait in a group or with the same gate, a field of the settings of the group or limit, and how many wait.
//!
//! Each setting is a field of its own, which is written alone, so that releases and programs with other settings keep them.

use bson::{Bson, Document, doc};
use mongodb::options::ReadConcern;

use super::InvalidSetting;
use crate::mongo::{DUE_JOBS, GATED_JOBS, Readable, Store, StoreError, any_gate, call};

/// Maximum number of groups with settings that are read.
const GROUPS: i64 = 10_000;
/// Largest number of waiting jobs that a setting allows.
pub const LARGEST_CAP: u64 = 1_000_000_000;

/// The settings of one group.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupBacklog {
    /// The group.
    pub group: String,
    /// With this many waiting jobs the group accepts no further ones; `None`: any number.
    pub most_waiting: Option<u64>,
}

fn most_waiting_in(document: &Document) -> Option<u64> {
    let most = match document.get("most_waiting") {
        // mongosh stores numbers as floating-point numbers; the validator accepts only integers.
        Some(Bson::Int32(most)) => u64::try_from(*most).ok(),
        Some(Bson::Int64(most)) => u64::try_from(*most).ok(),
        _ => None,
    };
    most.filter(|most| *most > 0)
}

pub(super) fn check_most_waiting(most: Option<u64>) -> Result<(), InvalidSetting> {
    match most {
        Some(most) if !(1..=LARGEST_CAP).contains(&most) => Err(InvalidSetting(format!(
            "{most} is no possible number of waiting jobs: give a number from 1 to {LARGEST_CAP}, or remove the setting"
        ))),
        Some(_) | None => Ok(()),
    }
}

fn change_to(most: Option<u64>) -> Document {
    match most {
        Some(most) => doc! { "$set": { "most_waiting": i64::try_from(most).unwrap_or(i64::MAX) } },
        None => doc! { "$unset": { "most_waiting": "" } },
    }
}

impl Store {
    /// The settings of all groups that have any, by name.
    ///
    /// Index: `_id`. Invariant: I9, an invalid document hides no other.
    pub async fn group_backlogs(&self) -> Result<Vec<GroupBacklog>, StoreError> {
        let groups = self.groups.clone();
        let found: Vec<Document> = call("group_backlogs", async move {
            groups.find(doc! {}).sort(doc! { "_id": 1 }).limit(GROUPS).read_concern(ReadConcern::local()).await?.readable().await
        })
        .await?;
        let backlog = |document: &Document| {
            Some(GroupBacklog { group: document.get_str("_id").ok()?.to_owned(), most_waiting: most_waiting_in(document) })
        };
        Ok(found.iter().filter_map(backlog).collect())
    }

    /// How many jobs may wait by each limit, by its name or prefix; `None`: any number.
    ///
    /// Filter: none. Index: none, the collection is small. Invariant: I9, an invalid document hides no other.
    pub async fn limit_backlogs(&self) -> Result<Vec<(String, Option<u64>)>, StoreError> {
        let limits = self.limits.clone();
        let found: Vec<Document> = call("limit_backlogs", async move {
            limits
                .find(doc! {})
                .projection(doc! { "most_waiting": 1 })
                .sort(doc! { "_id": 1 })
                .limit(GROUPS)
                .read_concern(ReadConcern::local())
                .await?
                .readable()
                .await
        })
        .await?;
        let backlog = |document: &Document| Some((document.get_str("_id").ok()?.to_owned(), most_waiting_in(document)));
        Ok(found.iter().filter_map(backlog).collect())
    }

    /// Sets how many jobs may wait with each gate that this limit covers; `None` removes the setting. Returns false if there is no such
    /// limit.
    ///
    /// Filter: the name of the limit. Index: `_id`. Invariant: none, an operator's setting.
    pub(crate) async fn put_most_waiting(&self, name: &str, most: Option<u64>) -> Result<bool, StoreError> {
        let (limits, id, change) = (self.limits.clone(), doc! { "_id": name }, change_to(most));
        let changed = call("put_most_waiting", async move { limits.update_one(id, change).await }).await?;
        self.caps().forget();
        let is_there = changed.matched_count == 1;
        if is_there {
            self.tell_plain("limit.changed", doc! { "name": name });
        }
        Ok(is_there)
    }

    /// Sets with how many waiting jobs a group accepts no further ones; `None` removes the setting. Other settings stay as they are.
    /// Processes that enqueue notice the change within about a second.
    ///
    /// Filter: the group. Index: `_id`. Invariant: none, an operator's setting.
    pub(crate) async fn put_most_waiting_in_group(&self, group: &str, most: Option<u64>) -> Result<(), StoreError> {
        self.ensure_set_up().await?;
        let (groups, id, change) = (self.groups.clone(), doc! { "_id": group }, change_to(most));
        let is_set = most.is_some();
        call("put_most_waiting_in_group", async move { groups.update_one(id, change).upsert(is_set).await }).await?;
        self.caps().forget();
        self.tell_plain("group.changed", doc! { "name": group });
        Ok(())
    }

    /// The number of jobs that wait with this gate, whenever they are due; counted up to `most`.
    ///
    /// Filter: gate, unlocked. Index: `gated_jobs`, two steps for each group and class with such jobs, and up to `most` entries. Invariant:
    /// none, the number is out of date when it arrives.
    pub async fn waiting_at(&self, gate: &str, most: u64) -> Result<u64, StoreError> {
        let (scheduled, unlocked) = (self.scheduled.clone(), doc! { "locked": false, "gate": gate });
        let index = self.index(GATED_JOBS);
        let counted = async move {
            let count = scheduled.count_documents(unlocked).limit(most).hint(index);
            count.read_concern(ReadConcern::local()).await
        };
        self.indexed("waiting_at", counted).await
    }

    /// The number of jobs that wait in a group, whenever they are due; counted up to `most`.
    ///
    /// Filter: group, unlocked. Index: `due_jobs` and `gated_jobs`, up to `most` entries. Invariant: none, the number is out of date when it
    /// arrives.
    pub async fn waiting_in(&self, group: &str, most: u64) -> Result<u64, StoreError> {
        let mut waiting = 0;
        for (index, gate) in [(DUE_JOBS, Bson::Null), (GATED_JOBS, any_gate().into())] {
            let (scheduled, unlocked) = (self.scheduled.clone(), doc! { "group": group, "locked": false, "gate": gate });
            let left = most - waiting;
            if left == 0 {
                break;
            }
            let index = self.index(index);
            let counted = async move {
                let count = scheduled.count_documents(unlocked).limit(left).hint(index);
                count.read_concern(ReadConcern::local()).await
            };
            waiting += self.indexed("waiting_in", counted).await?;
        }
        Ok(waiting)
    }
}
