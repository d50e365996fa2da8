//! The changes that operators make to limits, groups and pauses.

use std::time::Duration;

use super::{
    AGEING, InvalidSetting, Limit, WEIGHTS, check_group, check_limit, check_limit_name, groups::InvalidSetting as InvalidBacklog,
    pause::Paused, window::MaintenanceWindow,
};
use crate::{
    job::gate::group_of_resource,
    mongo::{Store, StoreError, schema::MOST_WINDOWS},
};

/// Why a setting was not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingError {
    /// The name or the value is not valid.
    #[error(transparent)]
    Invalid(#[from] InvalidSetting),
    /// An error of MongoDB.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Sets the limit of a resource, of each resource with a prefix (`customer:*`), or of a group (`@mail`). It holds from now on: a lower
/// capacity ends no running job.
///
/// # Errors
/// When the name is not one, the limit is empty, or the capacity is not from 1 to [`LARGEST_CAPACITY`](crate::mongo::schema::LARGEST_CAPACITY); or an error of MongoDB.
pub async fn set_limit(store: &Store, name: &str, limit: Limit) -> Result<(), SettingError> {
    check_limit_name(name)?;
    check_limit(limit)?;
    Ok(store.put_limit(name, limit).await?)
}

/// Sets how many jobs may wait for a resource with this limit; `None` removes the setting. Under a prefix (`customer:*`) this holds for each
/// resource by itself. Jobs that need exactly the same resources are counted together. A further enqueueing call is refused
/// ([`EnqueueError::GateFull`](crate::enqueue::EnqueueError::GateFull)). Processes that enqueue notice the change within about a second.
///
/// # Errors
/// When there is no such limit or the number is not possible, or an error of MongoDB.
pub async fn set_most_waiting(store: &Store, name: &str, most: Option<u64>) -> Result<(), SettingError> {
    check_limit_name(name)?;
    let refused = |problem: String| SettingError::Invalid(InvalidSetting(problem));
    if let Some(group) = group_of_resource(name) {
        return Err(refused(format!("set how many jobs may wait in the group with `recruiter groups set --most-waiting N {group}`")));
    }
    match store.put_most_waiting(name, most).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(refused(format!("{name} has no limit: give it a capacity or a rate first"))),
        Err(InvalidBacklog::Store(error)) => Err(error.into()),
        Err(problem) => Err(refused(problem.to_string())),
    }
}

/// Removes a limit. Jobs that name the resource wait until it has a limit again; a group has no limit then. Returns whether there was one.
///
/// # Errors
/// An error of MongoDB.
pub async fn remove_limit(store: &Store, name: &str) -> Result<bool, SettingError> {
    Ok(store.delete_limit(name).await?)
}

/// Sets the weight of a group; `None` removes it. If any group has a weight, the groups with waiting jobs share the starts by their weights,
/// and a group without one has weight 1.
///
/// # Errors
/// When the name or the weight is not valid ([`WEIGHTS`]), or an error of MongoDB.
pub async fn set_weight(store: &Store, group: &str, weight: Option<f64>) -> Result<(), SettingError> {
    check_group(group)?;
    if let Some(weight) = weight.filter(|weight| !WEIGHTS.contains(weight)) {
        return Err(InvalidSetting(format!("a weight must be from {} to {}, not {weight}", WEIGHTS.start(), WEIGHTS.end())).into());
    }
    Ok(store.put_weight(group, weight).await?)
}

/// Sets the ageing of a group; `None` removes it. A job that has waited for N times this time counts as N priorities higher, up to the
/// highest one.
///
/// # Errors
/// When the name or the time is not valid ([`AGEING`]), or an error of MongoDB.
pub async fn set_ageing(store: &Store, group: &str, ageing: Option<Duration>) -> Result<(), SettingError> {
    check_group(group)?;
    if ageing.is_some_and(|ageing| !AGEING.contains(&ageing)) {
        return Err(InvalidSetting("the time of an ageing must be from 10ms to 366days".into()).into());
    }
    Ok(store.put_ageing(group, ageing).await?)
}

/// Sets the maintenance windows of a group, in place of those that it has. No job of the group starts in them; running jobs continue.
///
/// # Errors
/// When the name is not valid, there are more than [`MOST_WINDOWS`], or an error of MongoDB.
pub async fn set_maintenance(store: &Store, group: &str, windows: &[MaintenanceWindow]) -> Result<(), SettingError> {
    check_group(group)?;
    if windows.len() > MOST_WINDOWS {
        return Err(InvalidSetting(format!("a group has at most {MOST_WINDOWS} maintenance windows")).into());
    }
    Ok(store.put_maintenance(group, windows).await?)
}

/// Pauses jobs: they are not assigned until [`resume`]. Running jobs continue. Returns false if the same was paused before: that pause
/// stays.
///
/// # Errors
/// An error of MongoDB.
pub async fn pause(store: &Store, paused: &Paused, by: &str, reason: Option<&str>) -> Result<bool, SettingError> {
    Ok(store.put_pause(paused, by, reason).await?)
}

/// Ends a pause. Returns whether there was one.
///
/// # Errors
/// An error of MongoDB.
pub async fn resume(store: &Store, paused: &Paused) -> Result<bool, SettingError> {
    Ok(store.delete_pause(paused).await?)
}
