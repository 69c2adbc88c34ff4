"""The tables of glm_comparison.py, chosen with their formulas before any tool was measured.

Each is a data set of an R package, prepared by an expression of R, where `data` is the table. Every tool gets the same
formula, that of the package's examples where there is one; its last name is the client. Numbers are standardised and
the five splits drawn in R with the seed 31 (glm_comparison.R); the digest is of the file with the splits.
"""

from typing import NamedTuple


class Table(NamedTuple):
    package: str
    formula: str
    digest: str
    family: str = "gaussian"
    prepare: str = "data"


TABLES = {
    "sleepstudy": Table("lme4", "Reaction ~ Days + (Days | Subject)", "ba969d49ad74"),
    "Orthodont": Table("nlme", "distance ~ age * Sex + (age | Subject)", "c1091e5aca40"),
    "Machines": Table("nlme", "score ~ Machine + (Machine | Worker)", "83c9ce4b3ed6"),
    "Oxboys": Table(
        "nlme", "height ~ age + age2 + (age + age2 | Subject)", "cacfc6e97e17", prepare="transform(data, age2 = age^2)"
    ),
    "BodyWeight": Table("nlme", "weight ~ Time * Diet + (Time | Rat)", "83716e0859da"),
    "Early": Table("mlmRev", "cog ~ age * trt + (age | id)", "595f7fa66e6f"),
    "Ovary": Table(
        "nlme",
        "follicles ~ sine + cosine + (sine + cosine | Mare)",
        "35760b3a6508",
        prepare="transform(data, sine = sin(2 * pi * Time), cosine = cos(2 * pi * Time))",
    ),
    "Blackmore": Table(
        "carData",
        "exercise ~ age * group + (age | subject)",
        "bb2cf3abe0d3",
        prepare="transform(data, exercise = log2(exercise + 5 / 60))",
    ),
    "dietox": Table("geepack", "Weight ~ Time * Cu + (Time | Pig)", "e4d028c351e2"),
    "Sitka": Table("MASS", "size ~ Time * treat + (Time | tree)", "911fa26efe51"),
    "cake": Table(
        "lme4",
        "angle ~ recipe + temp + (1 | batch)",
        "6cadc95338d2",
        prepare="transform(data, batch = paste0(recipe, replicate))",
    ),
    "ChickWeight": Table("datasets", "weight ~ Time * Diet + (Time | Chick)", "da4e9bb144ea"),
    "Exam": Table("mlmRev", "normexam ~ standLRT + sex + schavg + schgend + (standLRT | school)", "060665b8e2bc"),
    "Penicillin": Table("lme4", "diameter ~ sample + (1 | plate)", "344d53d81ead"),
    "Dialyzer": Table(
        "nlme",
        "rate ~ pressure * QB + pressure2 * QB + pressure3 * QB + (pressure + pressure2 | Subject)",
        "d0ff7011cbd8",
        prepare="transform(data, pressure2 = pressure^2, pressure3 = pressure^3)",
    ),
    "pbcseq": Table(
        "survival",
        "log_bili ~ year + age + sex + trt + (year | id)",
        "3dff21b7a2ed",
        prepare="transform(data, log_bili = log(bili), year = day / 365.25, trt = factor(trt))",
    ),
    "carrots": Table("lmerTest", "Preference ~ sens1 + sens2 + Homesize + (sens1 + sens2 | Consumer)", "c6161cbcc58a"),
    "ham": Table(
        "lmerTest",
        "liking ~ Product + Information + Gender + Age + (Product | Consumer)",
        "0b9579c55380",
        prepare="transform(data, liking = Informed.liking)",
    ),
    "Gasoline": Table(
        "plm", "lgaspcar ~ lincomep + lrpmg + lcarpcap + (lincomep + lrpmg + lcarpcap | country)", "a08b1dc3c002"
    ),
    "Males": Table(
        "plm",
        "wage ~ exper + exper2 + married + union + school + ethn + (exper | nr)",
        "51dade725341",
        prepare="transform(data, exper2 = exper^2)",
    ),
    "bacteria": Table(
        "MASS", "y ~ trt + week + (1 | ID)", "efc390de0408", "binomial", prepare="transform(data, y = y == 'y')"
    ),
    "Contraception": Table(
        "mlmRev",
        "use ~ age + age2 + livch + urban + (urban | district)",
        "a6a4a079b29b",
        "binomial",
        prepare="transform(data, use = use == 'Y', age2 = age^2)",
    ),
    "toenail": Table(
        "HSAUR3",
        "outcome ~ treatment * time + (1 | patientID)",
        "eb0c54ffd2c0",
        "binomial",
        prepare="transform(data, outcome = outcome == 'moderate or severe')",
    ),
    "respiratory": Table(
        "geepack",
        "outcome ~ treat + sex + age + baseline + (1 | person)",
        "933506d857f4",
        "binomial",
        prepare="transform(data, person = paste0(center, '_', id))",
    ),
    "ohio": Table("geepack", "resp ~ age * smoke + (1 | id)", "cf7a265f878e", "binomial"),
    "cbpp": Table(
        "lme4",
        "ill ~ period + (1 | herd)",
        "9fd16270f7cf",
        "binomial",
        prepare="transform(data[rep(1:nrow(data), data$size), ], "
        "ill = sequence(data$size) <= rep(data$incidence, data$size))",
    ),
    "KosteckiDillon": Table(
        "carData",
        "headache ~ time + medication + hatype + age + sex + (time | id)",
        "2cce1d9e351b",
        "binomial",
        prepare="transform(data, headache = headache == 'yes')",
    ),
    "schizophrenia2": Table(
        "HSAUR3",
        "disorder ~ onset * month + (1 | subject)",
        "fb7a9ca816d0",
        "binomial",
        prepare="transform(data, disorder = disorder == 'present')",
    ),
    "epil": Table("MASS", "y ~ lbase * trt + lage + V4 + (1 | subject)", "d99466dfb562", "negative binomial"),
    "grouseticks": Table("lme4", "TICKS ~ YEAR + HEIGHT + (1 | BROOD)", "253b735f792f", "negative binomial"),
    "Owls": Table(
        "glmmTMB",
        "SiblingNegotiation ~ FoodTreatment * SexParent + ArrivalTime + logBroodSize + (FoodTreatment | Nest)",
        "64038ebab7c6",
        "negative binomial",
    ),
    "Salamanders": Table("glmmTMB", "count ~ spp + mined + (1 | site)", "064e1baa42a7", "negative binomial"),
    "Arabidopsis": Table(
        "lme4",
        "fruits ~ nutrient + amd + rack + status + (nutrient | gen)",
        "b1e5d88beb34",
        "negative binomial",
        prepare="transform(data, fruits = total.fruits, nutrient = factor(nutrient), rack = factor(rack))",
    ),
    "Mmmec": Table(
        "mlmRev",
        "deaths ~ log_expected + uvb + (uvb | region)",
        "c8f2f673774c",
        "poisson",
        prepare="transform(data, log_expected = log(expected))",
    ),
    "Cigar": Table("plm", "sales ~ price + ndi + year + (price | state)", "11a377d7c55a", "gamma"),
    "RiceFarms": Table(
        "plm",
        "goutput ~ lseed + lurea + llabor + lsize + varieties + (lsize | id)",
        "adcb8b267d88",
        "gamma",
        prepare="transform(data, lseed = log(seed), lurea = log(urea), llabor = log(totlabor), lsize = log(size))",
    ),
    "EmplUK": Table(
        "plm",
        "emp ~ lwage + lcapital + loutput + (lcapital | firm)",
        "baf89d7d562f",
        "gamma",
        prepare="transform(data, lwage = log(wage), lcapital = log(capital), loutput = log(output))",
    ),
}
