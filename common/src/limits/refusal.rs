//! Whether the settings let the jobs of a lane start. Pure.
//!
//! The leading recruiter uses this function, and so does each command that says why a job waits. They differ in what they know: see [`InUse`].

use std::borrow::Cow;

use super::{Limit, Pause, Paused, Rate, Settings};
use crate::{
    base::Instant,
    job::{Lane, line_of_gate, resource_of_group, resources_in},
};

/// Why a job of a lane may not start now.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant says what its fields are")]
pub enum NotAdmitted {
    /// A pause covers it.
    Paused(Paused, Pause),
    /// It needs a resource without a limit.
    Undefined(String),
    /// The document of a limit or group is not valid.
    Invalid(String),
    /// As many permits of a resource are held as there are.
    Full { resource: String, capacity: u32 },
    /// The group is in a maintenance window, which ends then.
    Maintenance { group: String, until: Instant },
    /// The rate of a resource does not allow a start until then.
    Rate { resource: String, until: Instant },
}

/// What the settings are compared with, as one process knows it.
pub trait InUse {
    /// The pause of the line with this gate.
    fn halt_of(&self, gate: &str) -> Option<&Pause>;
    /// When the present maintenance window of a group ends. `None`: it is in none.
    fn closed_until(&self, group: &str) -> Option<Instant>;
    /// Number of jobs that use a resource.
    fn used(&self, resource: &str) -> usize;
    /// How many starts a rate allows now, at least one.
    ///
    /// # Errors
    /// When it allows none: when it allows the next one.
    fn starts(&self, resource: &str, rate: Rate) -> Result<usize, Instant>;
}

/// The limited resources of a lane, by name, and their limits.
pub type LaneLimits<'a> = Vec<(Cow<'a, str>, Limit)>;

impl Settings {
    /// How many jobs of this lane may start now (`usize::MAX` if it has no limit), and the limits that apply to it.
    ///
    /// # Errors
    /// When none may start: the first reason.
    pub fn admit<'a>(&self, lane: &'a Lane, in_use: &impl InUse) -> Result<(usize, LaneLimits<'a>), NotAdmitted> {
        if let Some((paused, pause)) = self.pause_of(&lane.group, &lane.class) {
            return Err(NotAdmitted::Paused(paused.clone(), pause.clone()));
        }
        if let Some((line, pause)) = lane.gate.as_ref().and_then(|gate| Some((line_of_gate(gate)?, in_use.halt_of(gate)?))) {
            return Err(NotAdmitted::Paused(Paused::Line(line.to_owned()), pause.clone()));
        }
        if let Some(until) = in_use.closed_until(&lane.group) {
            return Err(NotAdmitted::Maintenance { group: lane.group.clone(), until });
        }
        let limits = self.limits_of(lane)?;
        let mut room = usize::MAX;
        for (resource, limit) in &limits {
            if let Some(capacity) = limit.capacity {
                room = room.min((capacity as usize).saturating_sub(in_use.used(resource)));
                if room == 0 {
                    return Err(NotAdmitted::Full { resource: resource.to_string(), capacity });
                }
            }
            if let Some(rate) = limit.rate {
                let allowed = in_use.starts(resource, rate);
                room = room.min(allowed.map_err(|until| NotAdmitted::Rate { resource: resource.to_string(), until })?);
            }
        }
        Ok((room, limits))
    }

    /// The limits of the lane's resources and of its group.
    ///
    /// # Errors
    /// When one of them is not valid, or a resource has none.
    pub fn limits_of<'a>(&self, lane: &'a Lane) -> Result<LaneLimits<'a>, NotAdmitted> {
        let mut limits = Vec::new();
        for resource in lane.gate.iter().flat_map(|gate| resources_in(gate)) {
            if let Some(invalid) = self.invalid_for(resource) {
                return Err(NotAdmitted::Invalid(invalid.to_owned()));
            }
            let Some(limit) = self.limit_of(resource) else { return Err(NotAdmitted::Undefined(resource.to_owned())) };
            limits.push((Cow::Borrowed(resource), limit));
        }
        if self.groups.is_empty() && self.invalid.is_empty() {
            return Ok(limits);
        }
        let resource = || resource_of_group(&lane.group);
        if !self.invalid.is_empty() && self.invalid.contains(&resource()) {
            return Err(NotAdmitted::Invalid(resource()));
        }
        if let Some(group) = self.groups.get(&lane.group).filter(|group| group.limit != Limit::default()) {
            limits.push((Cow::Owned(resource()), group.limit));
        }
        Ok(limits)
    }
}
